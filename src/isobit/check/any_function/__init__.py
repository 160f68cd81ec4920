"""Any function of rows, whether isobit has such an op or not: do the bits of a row depend on the batch?"""
