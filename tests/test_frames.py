"""From a public function to the first launch there are few frames of isobit, each with a name of its own."""

import json

from interpreted import in_interpreter

#: Functions of isobit on the stack at the first launch, the public function and the launch included.
MOST = 8

PROGRAM = """
import json, sys
from pathlib import Path
import torch, isobit
from isobit.frame import launch

ROOT = str(Path(isobit.__file__).parent)
half = lambda *shape: torch.randn(*shape).bfloat16()
ids, logits, x = torch.tensor([1, 2]), torch.randn(2, 8), half(2, 16)
loss = dict(rewards=torch.ones(1), samples_per_prompt=1, backend="triton")
q = half(1, 3, 2, 64)
CALLS = {
    "logp": lambda: isobit.logp(logits, ids, backend="triton"),
    "logp, with a gradient": lambda: isobit.logp(logits.clone().requires_grad_(), ids, backend="triton"),
    "ratio_kl": lambda: isobit.ratio_kl(logits, logits, ids, backend="triton"),
    "grpo_loss": lambda: isobit.grpo_loss(logits[None], None, ids[None], **loss),
    "linear_logp": lambda: isobit.linear_logp(x.requires_grad_(), half(8, 16), ids, backend="triton"),
    "rms_norm": lambda: isobit.rms_norm(x, half(16), backend="triton"),
    "rope": lambda: isobit.rope(q, q, half(3, 64), half(3, 64), backend="triton"),
    "attention_sink": lambda: isobit.attention_sink(q, q.float().sum(-1), half(2), backend="triton"),
    "swiglu": lambda: isobit.swiglu(x, x, backend="triton"),
    "det_linear": lambda: isobit.det_linear(x, half(4, 16).requires_grad_(), backend="triton"),
    "det_gemm_dw": lambda: isobit.det_gemm_dw(x.detach(), half(2, 4), backend="triton"),
    "attention": lambda: isobit.attention(q.requires_grad_(), q, q, backend="triton"),
}
stacks = {}

def hook(frame, event, argument):
    if event == "call" and frame.f_code is launch.run.__code__ and name not in stacks:
        stacks[name] = own = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(ROOT):
                own.append(frame.f_code.co_name)
            frame = frame.f_back

for name, call in CALLS.items():
    for again in range(2):
        stacks.pop(name, None)
        sys.setprofile(hook)
        call()
        sys.setprofile(None)
        stacks[name].reverse()
print(json.dumps(stacks))
"""


def test_a_launch_is_at_most_eight_frames_from_the_call() -> None:
    stacks = json.loads(in_interpreter(PROGRAM))
    assert len(stacks) == 12
    for call, frames in stacks.items():
        assert len(frames) <= MOST, (call, frames)
        assert frames[0] == call.partition(",")[0] and frames[-1] == "run"
        assert frames[1:4] == ["__call__", "run", "run_backend"], frames
