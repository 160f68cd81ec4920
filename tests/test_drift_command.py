"""`isobit drift`: what it prints and writes, its page, and what it says about a rollout or bad input."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from commands import Isobit, report
from isobit.cli.html import page
from isobit.drift import measure_rollout, read_rollouts
from isobit.drift.axes import alone
from isobit.drift.calls import Run
from isobit.drift.readings import Sampling, read_as
from isobit.drift.report import Report
from isobit.frame.contract import ContractError
from row_by_row import V, made, sequences

BOS = 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny config with weights."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_a_report_and_its_page(isobit: Isobit, checkpoint: str, tmp_path: Path) -> None:
    html, saved = tmp_path / "drift.html", tmp_path / "drift.json"
    few = ("--tokens", "30", "--length", "12", "--device", "cpu")
    done = isobit("drift", checkpoint, *few, "--html", str(html), "--json", str(saved))
    made = json.loads(saved.read_text())
    differ = any(row["metrics"]["differ"] for row in made["axes"])
    assert done.code == int(differ) and made["passed"] is not differ and made["tokens"] == 30
    assert (
        not made["random_weights"] and len(made["axes"]) == 10 and made["command"].startswith("isobit drift")
    )
    assert "LlamaForCausalLM, fp32 on cpu: 4 sequences, 30 tokens" in done.out
    table = [line for line in done.out.splitlines() if re.match(r"[a-z]+: .* \d+ of \d+  ", line)]
    assert len(table) == 11 and max(map(len, table)) <= 80
    assert "decode: static cache" in done.err  # progress
    text = html.read_text()
    assert "<h3>What differs</h3>" in text and "http" not in text.replace("https://github.com", "")
    # The same page from the file.
    assert page([made], "isobit drift") == text
    again = tmp_path / "again.html"
    shown = isobit("report", str(saved), "--html", str(again))
    assert shown.code == 0 and f"{saved}: drift of {checkpoint}: " in shown.out
    assert again.read_text() == text.replace("isobit drift</title>", "isobit report</title>").replace(
        "<h1>isobit drift", "<h1>isobit report"
    )


def test_a_saved_report_is_compared_with_an_older_one(isobit: Isobit, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"

    def save(path: Path, **differ: int) -> None:
        rows = [{"axis": a, "setting": "x", "metrics": {"differ": n, "tokens": 9}} for a, n in differ.items()]
        path.write_text(json.dumps({"stamp": {}, "model": "m", "axes": rows}))

    save(old, batch=0, chunk=5, decode=3, length=0)
    save(new, batch=2, chunk=1, padding=0, length=0)
    done = isobit("report", str(new), "--against", str(old))
    assert done.code == 1 and done.out.splitlines() == [
        "WORSE batch: x: 0 of 9 tokens differ -> 2 of 9 tokens differ",
        "WORSE decode: x: 3 of 9 tokens differ -> not there",
        "      chunk: x: 5 of 9 tokens differ -> 1 of 9 tokens differ",
        "      padding: x: not there -> 0 of 9 tokens differ",
        "2 worse, 2 better or other",
    ]
    assert isobit("report", str(old), "--against", str(old)).code == 0


def test_random_weights_are_said_and_json_goes_to_standard_output(isobit: Isobit, checkpoint: str) -> None:
    small = ("--vs", "packed,micro-batch", "--no-where", "--tokens", "20", "--length", "8", "--device", "cpu")
    done = isobit("drift", checkpoint, "--random", *small, "--json", "-")
    made = report(done)
    assert made["random_weights"] and made["dtype"] == "bf16" and "random" in " ".join(made["notes"])
    assert [row["axis"] for row in made["axes"]] == ["packed", "micro-batch", "micro-batch"]
    assert all(row["where"] is None for row in made["axes"])


def test_prompts_of_a_file(isobit: Isobit, checkpoint: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2, 3]\n\n[4, 5]\n")
    small = ("--vs", "length", "--device", "cpu", "--prompts", str(prompts))
    made = report(isobit("drift", checkpoint, *small, "--json", "-"))
    assert (made["sequences"], made["tokens"]) == (2, 5)
    mistakes = {
        "[1, 2]\nno\n": ":2: neither a list of ids", "": "no lines in it", '"text"\n': "no tokenizer",
        f"[1, {V}]\n": "outside the vocabulary",
    }  # fmt: skip
    for wrong, message in mistakes.items():
        prompts.write_text(wrong)
        done = isobit("drift", checkpoint, *small)
        assert done.code == 1 and message in done.err.splitlines()[-1], done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "MODEL nowhere: no such folder or config"),
        (("CHECKPOINT/config.json",), "a config has no weights; --random makes some"),
        (("CHECKPOINT", "--vs", "sideways"), "unknown axis 'sideways'; known: batch, padding"),
        (("CHECKPOINT", "--tokens", "-1"), "--tokens is 0, for all, or more"),
        (("CHECKPOINT", "--rollout", "nothing.jsonl"), "cannot be read"),
        (("CHECKPOINT", "--rollout", "x", "--vs", "batch"), "no --prompts and no --vs"),
        (("CHECKPOINT", "--html", "nowhere/x.html"), "no folder nowhere"),
    ],
)
def test_bad_arguments_are_one_line(
    isobit: Isobit, checkpoint: str, arguments: tuple[str, ...], message: str
) -> None:
    done = isobit("drift", *(a.replace("CHECKPOINT", checkpoint) for a in arguments), "--device", "cpu")
    assert done.code == 1 and message in done.err.splitlines()[-1] and "Traceback" not in done.err


# Rollouts


MODEL = made(bos_token_id=BOS)
RIGHT = Sampling()


def lines(
    sampling: Sampling = RIGHT, model: Any = MODEL, bos: bool = False, shift: int = 0, **options: Any
) -> list[dict[str, Any]]:
    """A rollout as an engine with these options, or with some mistake, would write it."""
    rows = []
    for ids in sequences((12, 16, 10)):
        ids = ids.clamp(min=2)
        given = torch.cat((torch.tensor([BOS]), ids)) if bos else ids
        ((logps,),) = Run(model, torch.device("cpu")).read(alone([given]), [given], [read_as(sampling)])
        outputs = logps[len(logps) - 6 - shift : len(logps) - shift]
        rows.append({
            "prompt_ids": ids[:-6].tolist(), "output_ids": ids[-6:].tolist(), "logprobs": outputs.tolist(),
            "logprob_bits": [struct.pack(">f", x).hex() for x in outputs.tolist()],
            "engine": "vllm", "version": "0.26.0", "options": options,
        })  # fmt: skip
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., Report]:
    def measured(rows: list[Any], model: Any = MODEL, **options: Any) -> Report:
        return measure_rollout(model, write(tmp_path / "rollout.jsonl", rows), **options)

    return measured


Measured = Callable[..., Report]


def test_a_rollout_of_the_same_model_is_equal(measured: Measured) -> None:
    found = measured(lines())
    assert found.differ == 0 and not found.causes and found.tokens == 18
    assert [(row.axis, row.setting) for row in found.rows] == [("rollout", "vllm 0.26.0")]


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ({"sampling": Sampling(0.7)}, "of temperature 0.7, the trainer's of 1"),
        ({"sampling": Sampling(0.66), "temperature": 1.0}, "of temperature 0.66, the trainer's of 1"),
        ({"bos": True}, "BOS is missing"),
        ({"shift": 1}, "shifted by one: each belongs to the token before it"),
    ],
)
def test_a_mistake_is_named_before_anything_else(measured: Measured, mistake: Any, cause: str) -> None:
    found = measured(lines(**mistake))
    assert len(found.causes) == 1 and cause in found.causes[0] and cause in str(found)
    with_it, without = found.rows
    assert with_it.differ and without.differ == 0 and without.setting == "without that"


def test_the_opposite_mistakes_are_named_too(measured: Measured) -> None:
    shifted, longer = lines(), lines()
    for row in shifted:
        del row["logprob_bits"]
        row["logprobs"] = row["logprobs"][1:] + row["logprobs"][:1]  # the last one is of no token behind it
    found = measured(shifted)
    assert len(found.causes) == 1 and "each belongs to the token after it" in found.causes[0]
    assert found.rows[0].differ == 18 and found.rows[1].differ == 0
    for row in longer:
        row["prompt_ids"] = [BOS, *row["prompt_ids"]]
    found = measured(longer)
    assert len(found.causes) == 1 and "a BOS too much" in found.causes[0] and found.rows[1].differ == 0


def test_what_options_explain_is_split_from_the_rest(measured: Measured) -> None:
    """A row for each option, in which less is left; no mistake is looked for, because nothing is left."""
    sampled = Sampling(0.7, top_k=20, top_p=0.9)
    names = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "logprobs_mode": "processed_logprobs"}
    found = measured(likeliest(lines(**names), sampled))
    assert [row.setting for row in found.rows] == ["vllm 0.26.0", "with temperature 0.7, top_k 20, top_p 0.9"]
    assert found.rows[0].differ and found.rows[1].differ == 0 and len(found.causes) == 1
    assert "the engine's log-probabilities are of temperature 0.7, top_k 20" in found.causes[0]


def likeliest(rows: list[dict[str, Any]], sampling: Sampling) -> list[dict[str, Any]]:
    """The same with greedy outputs: no token that top-k and top-p leave out."""
    made_rows = []
    for row in rows:
        ids = torch.tensor(row["prompt_ids"])
        for _ in range(6):
            ids = torch.cat((ids, MODEL(ids[None]).logits[0, -1:].argmax(-1)))
        ((logps,),) = Run(MODEL, torch.device("cpu")).read(alone([ids]), [ids], [read_as(sampling)])
        without = {key: value for key, value in row.items() if key != "logprob_bits"}
        made_rows.append(without | {"output_ids": ids[-6:].tolist(), "logprobs": logps[-6:].tolist()})
    return made_rows


def test_a_stated_temperature_of_raw_log_probabilities(measured: Measured) -> None:
    """It explains nothing, whether the file says that they are raw or not."""
    said = measured(lines(temperature=0.7, logprobs_mode="raw_logprobs"))
    assert said.differ == 0 and len(said.rows) == 1 and not said.causes + said.remarks
    unsaid = measured(lines(temperature=0.7))
    assert unsaid.differ == 0 and len(unsaid.rows) == 1 and "returns raw ones" in str(unsaid)


def test_the_dtype_and_the_head_of_an_engine(measured: Measured) -> None:
    """A trainer in fp32; an engine with the same weights in bf16, and with logits from a head in fp32."""
    trainer, engine = plain(), plain()
    for p in engine.parameters():
        p.data = p.data.bfloat16()  # engines leave rotary frequencies in fp32
    before = [p.clone() for p in trainer.parameters()]
    found = measured(lines(model=engine, dtype="bfloat16"), trainer)
    assert [row.setting for row in found.rows] == ["vllm 0.26.0", "with weights in bf16"]
    assert found.rows[0].differ == 18 and found.rows[1].differ == 0
    assert "the engine's weights are in bf16, the trainer's in fp32" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters(), strict=True))
    head = engine.lm_head
    head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight.float())
    rows = lines(model=engine, dtype="bfloat16", fp32_head=True)
    found = measured(rows, trainer)
    assert [row.setting for row in found.rows][1:] == ["with weights in bf16", "with an LM head in fp32"]
    assert found.rows[1].differ > found.rows[2].differ == 0 and len(found.causes) == 2
    assert not trainer.lm_head._forward_hooks


def plain() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_other_weights_are_named(measured: Measured) -> None:
    other = made(layers=1)
    found = measured(lines(model=other))
    assert len(found.rows) == 1 and "of another model" in found.causes[0]
    nearly = made(bos_token_id=BOS)
    with torch.no_grad():
        nearly.lm_head.weight += 0.03 * torch.randn(nearly.lm_head.weight.shape)
    found = measured(lines(model=nearly))
    assert len(found.rows) == 1 and "weights of another step" in found.causes[0], found.causes


def test_lines_beyond_a_number_of_tokens_are_said(measured: Measured) -> None:
    found = measured(lines(), tokens=30)
    assert found.tokens == 12 and "2 of 3 sequences were compared" in str(found)
    assert measured(lines(), tokens=1).tokens == 6  # the first one in any case
    mixed = lines(dtype="bf16")[:1] + lines(dtype="fp16")[1:]
    with pytest.raises(ContractError, match=r"lines differ in options\.dtype"):
        measured(mixed)


def test_a_small_difference_has_no_cause(measured: Measured) -> None:
    rows = lines()
    for row in rows:
        row["logprobs"] = [x - 1e-3 for x in row["logprobs"]]
        del row["logprob_bits"]
    found = measured(rows)
    assert found.differ == 18 and not found.causes and abs(found.rows[0].metrics["kl"] + 1e-3) < 1e-6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", ":1: not JSON"),
        ("[1]", "not an object"),
        ('{"prompt_ids": [1], "output_ids": [2]}', "logprobs missing"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [-1, -2]}', "2 logprobs for 1 output_ids"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [0.5]}', "0.5 is not a log-probability"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [NaN]}', "nan is not a log-probability"),
        ('{"prompt_ids": ["a"], "output_ids": [2], "logprobs": [-1]}', "lists of integers"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [-1], "logprob_bits": ["x"]}', "hexadecimal"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [-1], "logprob_bits": ["c0000000"]}',
         "not those"),
        ("", "no lines in it"),
        *(
            (f'{{"prompt_ids": [1], "output_ids": [2], "logprobs": [-1], "options": {options}}}', message)
            for options, message in (
                ("[1]", "options is an object"), ('{"temperature": -1}', "temperature -1: a number from 0"),
                ('{"top_p": 0}', "top_p 0: above 0"), ('{"top_k": 1.5}', "top_k 1.5: an integer"),
                ('{"dtype": "int4"}', "dtype 'int4': one of bf16"), ('{"fp32_head": 1}', "true or false"),
                ('{"logprobs_mode": "raw_logits"}', "logprobs_mode 'raw_logits': one of raw_logprobs"),
            )
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_rollout(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rollout.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ContractError, match=message):
        read_rollouts(path)


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1], "output_ids": [V], "logprobs": [-1.0]}]
    with pytest.raises(ContractError, match="outside the vocabulary"):
        measure_rollout(MODEL, write(tmp_path / "rollout.jsonl", rows))


def test_the_command_compares_a_rollout(isobit: Isobit, checkpoint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rollout.jsonl", lines())  # of another model
    html = tmp_path / "page.html"
    done = isobit("drift", checkpoint, "--rollout", str(path), "--device", "cpu", "--html", str(html))
    assert done.code == 1 and "rollout: vllm 0.26.0" in done.out
    assert "of another model" in done.out and "of another model" in html.read_text()
