"""`axonn check`: the verdict that `deepspeed.initialize` would give, without a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest

from axonn_plugins.cli import check, main
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed import patch

BLOCK: dict[str, Any] = {"tensor_parallel": {"gx": 2, "gz": 2, "plan": "auto"}}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 96,
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def configuration(**keys: Any) -> str:
        Path("ds.json").write_text(json.dumps({"train_batch_size": 32, "axonn": BLOCK} | keys))
        return "ds.json"

    return configuration


def test_what_goes_together(write: Any, capsys: pytest.CaptureFixture) -> None:
    engine = deepspeed.DeepSpeedEngine
    file = write(
        bf16={"enabled": True},
        scheduler={"type": "CosineAnnealingLR", "params": {"T_max": 3}},
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
    )
    Path("config.json").write_text(json.dumps(LLAMA))
    assert main(["check", file, "--ranks", "8", "--model", "config.json"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks: obeyed" in out and "gx=2 gy=1 gz=2 gdata=2" in out and "4 of 8 ranks read different data" in out
    assert "a step: 32 samples, 8 a reader at a time, 1 micro-batches" in out and "are on: tensor_parallel\n" in out
    assert "model.layers.*.mlp.down_proj" in out and "16 bytes a parameter" in out
    assert deepspeed.DeepSpeedEngine is engine
    assert main(["check", write(train_batch_size=10**8), "--ranks", f"{2 * 10**8}"]) == 0
    out = capsys.readouterr().out
    assert "200000000 ranks, gx=2 gy=1 gz=2 gdata=50000000\n" in out and len(out) < 1000
    # Of a block that splits nothing all ranks share states out; of an open grid nothing is known.
    file = write(bf16={"enabled": True}, zero_optimization={"stage": 1}, axonn={"goldfish": {"k": 4}})
    assert main(["check", file, "--ranks", "8", "--model", "config.json"]) == 0
    assert "5.5 bytes a parameter" in capsys.readouterr().out
    file = write(axonn={"tensor_parallel": {"gx": "auto", "plan": "auto"}})
    assert main(["check", file, "--ranks", "8", "--model", "config.json"]) == 0
    out = capsys.readouterr().out
    assert 'whose sizes are "auto"; write gx, gy and gz as numbers' in out and "bytes a parameter" not in out


AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
CHOSEN = {"tensor_parallel": {"gx": "auto", "plan": "auto"}}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (AUTO, "the HF Trainer fills in train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps"),
        (AUTO | {"axonn": CHOSEN}, "the HF Trainer fills in train_batch_size"),
        (AUTO | {"train_batch_size": 32}, "the HF Trainer fills in train_micro_batch_size_per_gpu"),
        ({"axonn": {"pipeline": {}}}, "as many ranks read different data as the PipelineModule's"),
        ({"axonn": {"samo": {"sparsity": 0.5}}}, "32 samples, 8 a reader at a time, 1 micro-batches"),
    ],
)
def test_a_step_is_told_as_far_as_it_is_known(
    write: Any, capsys: pytest.CaptureFixture, keys: dict[str, Any], line: str
) -> None:
    """As HF's documentation writes configurations, too."""
    assert main(["check", write(**keys), "--ranks", "4"]) == 0
    assert f"\na step: {line}" in capsys.readouterr().out


def test_files_are_read_as_deepspeed_reads_them(write: Any, capsys: pytest.CaptureFixture) -> None:
    """With comments, and no key twice, which under the block counted once without a word."""
    file = Path(write())
    plain = file.read_text()
    file.write_text(plain.replace("{", "{ # as we always train\n", 1))
    assert main(["check", str(file), "--ranks", "8"]) == 0
    assert isinstance(patch.read(str(file)), dict)
    file.write_text(plain.replace("{", '{"train_batch_size": 16, ', 1))
    assert main(["check", str(file), "--ranks", "8"]) == 2
    assert "Duplicate keys" in capsys.readouterr().err
    with pytest.raises(ValueError, match="Duplicate keys"):
        deepspeed.DeepSpeedConfig(str(file))


@pytest.mark.parametrize(
    ("ranks", "keys", "words"),
    [
        (2, {"axonn": {"samo": {"sparsity": 0.5}}, "train_batch_size": 7}, "train_batch_size = 7 does not divide by"),
        (2, {"axonn": {"goldfish": {"k": 2}}, "train_batch_size": "8"}, "train_batch_size = '8' is not an integer"),
        (7, {}, "gx*gy*gz = 2*1*2 = 4 does not divide the 7 ranks"),
        (8, {"train_batch_size": 30}, "train_batch_size = 30 does not divide by gz*gdata = 2*2"),
        (8, {"zero_optimization": {"stage": 3}}, "zero_optimization.stage = 3"),
        (8, {"zero_optimization": {"stage": 9}}, "zero_optimization.stage = 9 is not"),
        (8, {"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage = "two" is not 0, 1, 2 or 3'),
        (8, {"zero_optimization": {"stage": None}}, "zero_optimization.stage = null is not 0, 1, 2 or 3"),
        (8, {"gradient_clipping": "1.0"}, 'gradient_clipping = "1.0" is not a number; write one without quotes'),
        (8, {"optimizer": "Adam"}, 'optimizer = "Adam" is not an object; write it in'),
        (
            8,
            {"optimizer": {"type": "AdamW", "params": {"lr": "x"}}},
            'optimizer.params.lr = "x" is not a number; write one without quotes',
        ),
        (
            8,
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, True]}}},
            "optimizer.params.betas = [0.9, true] is not a number",
        ),
        (8, {"optimizer": {"type": "AdamW", "params": 3}}, "optimizer.params = 3 is not an object"),
        (8, {"optimizer": {"type": 3}}, 'optimizer.type = 3 is not a name; write one in quotes, such as "AdamW"'),
        (
            8,
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": {}}}},
            "scheduler.params.warmup_max_lr = {} is not a number",
        ),
        (8, {"optimizer": {"type": "AdamWW"}}, "none of DeepSpeed's and torch's; the nearest is \"AdamW\""),
        *(
            (8, {"optimizer": {"type": kind, "params": params}, "zero_optimization": {"stage": stage}}, words)
            for kind, params, stage, words in (
                (
                    "AdamW",
                    {"lr": 0.1, "momentun": 0.9},
                    0,
                    "params of AdamW: got an unexpected keyword argument 'momentun'",
                ),
                ("Adam", {"wd": 0.1}, 1, "params of Adam: got an unexpected keyword argument 'wd'"),
                ("SGD", {"lr": -1}, 0, "params of SGD: Invalid learning rate: -1"),
                ("Muon", {"momentun": 0.9}, 0, "params of Muon: it has no momentun, but lr, momentum"),
                ("Adam", {"max_grad_norm": 1.0}, 0, "max_grad_norm is read by no optimizer; write gradient_clipping"),
            )
        ),
        (8, {"bf16": True}, "bf16 = true is not an object"),
        (8, {"axonn": "auto"}, 'axonn = "auto" is not an object'),
        (8, {"tensor_parallel": {"autotp_size": "2"}}, "tensor_parallel.autotp_size is DeepSpeed's own"),
        (8, {"tensor_parallel": {"autotp_size": None}}, "tensor_parallel.autotp_size is DeepSpeed's own"),
        (
            8,
            {"zero_optimization": {"reduce_bucket_size": "x"}},
            'refuses it: reduce_bucket_size = "x": Input should be',
        ),
        (8, {"axonn": {"tensor_paralel": {}}}, "tensor_parallel"),
        (8, {"scheduler": {"type": "WarmupDR"}}, 'scheduler.type = "WarmupDR" is none of DeepSpeed\'s'),
        (
            8,
            {"scheduler": {"type": "WarmupLR", "params": {"steps": 3}}},
            "scheduler.params of WarmupLR: got an unexpected",
        ),
    ],
)
def test_what_is_refused(write: Any, capsys: pytest.CaptureFixture, ranks: int, keys: Any, words: str) -> None:
    assert main(["check", write(**keys), "--ranks", str(ranks)]) == 1
    out = capsys.readouterr().out
    assert f"{ranks} ranks: refused" in out and words in out


def test_keys_that_deepspeed_passes_over(write: Any) -> None:
    raw, _ = check.load(
        Path(write(zero_optimisation={}, gradient_clipping=1.0, wall_clock_breakdown=True, bf16={}, fp16={}, aio={}))
    )
    (said,) = check.unknown(raw)
    assert said == '"zero_optimisation" is no key that DeepSpeed reads; the nearest is "zero_optimization"'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", 'has no "axonn" block'),
        ('{"axonn": null}', 'has no "axonn" block'),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_none(write: Any, text: str | None, words: str) -> None:
    file = Path("other.json")
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        check.load(file)


@pytest.mark.parametrize(
    ("script", "keys", "words"),
    [
        ("import deepspeed\ndeepspeed.initialize(mpu=unit)", {"tensor_parallel"}, "t.py:2: mpu does not go with"),
        ("x = 1", {"samo"}, "nothing obeys the block"),
        (
            "deepspeed.initialize()\nDistributedSampler(data, num_replicas=4)",
            {"tensor_parallel"},
            "t.py:2: the sampler",
        ),
        ("Trainer(model)\nDistributedSampler(data, num_replicas=4)", {"tensor_parallel"}, "t.py:1: the HF Trainer"),
        ("deepspeed.initialize(model=model)", {"pipeline"}, "none is made in it"),
        ("deepspeed.initialize(model=PipelineModule(layers))", {"tensor_parallel"}, '"pipeline": {} in the block'),
    ],
)
def test_a_script_is_read(tmp_path: Path, script: str, keys: set[str], words: str) -> None:
    from axonn_plugins.cli.check_script import notes

    file = tmp_path / "t.py"
    file.write_text(script)
    said = notes(file, keys, replicas=2)
    assert any(words in one for one in said), said
    assert sum("sampler deals" in one for one in said) == (words == "t.py:2: the sampler")
    with pytest.raises(ConfigError, match="no Python script"):
        file.write_text("def")
        notes(file, keys, 1)
