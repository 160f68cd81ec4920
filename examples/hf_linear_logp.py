"""Log-probabilities of a Hugging Face causal language model without its logits.

    python examples/hf_linear_logp.py

Trainers ask a model for logits [B, T, V], take their log_softmax, and keep one number of every V. Here the
model's body gives hidden states and `isobit.linear_logp` does the rest: the same numbers and gradients, from
a bounded part of the logits at a time. Random weights and a tiny model, on the CPU.
"""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import isobit


def from_logits(model: LlamaForCausalLM, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=input_ids).logits[:, :-1].float()
    log_p = F.log_softmax(logits, dim=-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    return log_p * mask


def from_hidden_states(model: LlamaForCausalLM, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # These three lines replace those above.
    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    head = model.lm_head
    return isobit.linear_logp(hidden, head.weight, input_ids[:, 1:], bias=head.bias, mask=mask)


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    input_ids = torch.randint(0, config.vocab_size, (2, 17))
    mask = torch.arange(16).expand(2, 16) >= 4  # the first four tokens are a prompt: masked

    results = {}
    for logp_of in (from_logits, from_hidden_states):
        model.zero_grad()
        logp = logp_of(model, input_ids, mask)
        (-logp.sum() / mask.sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        name = logp_of.__name__
        results[name] = (logp.detach(), gradient)
        print(f"{name:18s} logp {logp[0, 4:8].tolist()}, norm of all gradients {gradient.norm():.6f}")

    (logp, gradient), (ours, our_gradient) = results.values()
    torch.testing.assert_close(ours, logp, rtol=0, atol=2e-5)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-4, atol=1e-6)
    print(f"largest difference: logp {(ours - logp).abs().max():.1e}, gradient "
          f"{(our_gradient - gradient).abs().max():.1e}")  # fmt: skip

    here = logp.numel() * config.vocab_size * 4
    there = 8 * 4096 * 151_936 * 4
    print(
        f"all logits in fp32: {here / 1e6:.1f} MB here, {there / 1e9:.1f} GB for 8 x 4096 tokens, V = 151936;"
    )
    print("linear_logp stores none of them; its backward takes their gradients in parts (workspace_bytes)")


if __name__ == "__main__":
    main()
