"""Constants that determine the order of sums of class sink/1, for kernels and the model."""

#: Lanes of a sum over tokens: lane j adds tokens j, j + 1024, ...
LANES = 1024
