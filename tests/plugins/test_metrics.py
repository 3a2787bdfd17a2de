import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from axonn_plugins.observe import metrics
from axonn_plugins.observe.metrics import MetricsLogger, flops_per_token, format_step, peak_flops, process_memory_bytes


def logged(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_importing_is_light():
    code = (
        "import sys, axonn_plugins.observe.metrics; print(*({'torch', 'matplotlib', 'tensorboard'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == ""


def test_every_step_is_on_disk_at_once(tmp_path):
    logger = MetricsLogger(tmp_path / "new" / "run")
    logger.log(0, loss=torch.tensor(4.5), lr=1e-3)
    logger.log(1, loss=math.nan, grad_norm=math.inf, note="overflow")
    assert logged(tmp_path / "new" / "run") == [
        {"step": 0, "loss": 4.5, "lr": 1e-3},
        {"step": 1, "loss": None, "grad_norm": None, "note": "overflow"},
    ]
    logger.finish()


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path):
    first = MetricsLogger(tmp_path)
    for step in range(6):
        first.log(step, loss=float(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')

    second = MetricsLogger(tmp_path, resume_step=3)
    assert [record["step"] for record in logged(tmp_path)] == [0, 1, 2, 3]
    second.log(4, loss=40.0)
    second.finish()
    assert [(record["step"], record["loss"]) for record in logged(tmp_path)][-2:] == [(3, 3.0), (4, 40.0)]


def test_resuming_mends_a_last_line_without_its_end(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 2.0}')
    logger = MetricsLogger(tmp_path, resume_step=1)
    logger.log(2, loss=3.0)
    logger.finish()
    assert [record["step"] for record in logged(tmp_path)] == [0, 1, 2]


def test_the_old_file_survives_a_failed_rewrite(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsLogger(tmp_path, resume_step=0)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_without_a_step_to_resume_from_a_run_starts_anew(tmp_path):
    MetricsLogger(tmp_path).log(0, loss=1.0)
    MetricsLogger(tmp_path)
    assert logged(tmp_path) == []


def test_finish_draws_training_and_validation(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, x, y, *_, label, **__: drawn.append((label, x, y)))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda axes: None)
    logger = MetricsLogger(tmp_path)
    logger.log(1, loss=3.0)
    logger.log(2, loss=None, val_loss=2.5)
    logger.log(3, loss=2.0)
    logger.finish()
    assert drawn == [("training", (1, 3), (3.0, 2.0)), ("validation", (2,), (2.5,))]


def test_finish_writes_a_picture_and_events(tmp_path):
    logger = MetricsLogger(tmp_path)
    for step in range(1, 4):
        logger.log(step, loss=3.0 / step, lr=1e-3)
    logger.finish()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "lr"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 1.5), (3, 1.0)]


def test_without_a_loss_there_is_no_picture(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log(0, lr=1e-3)
    logger.finish()
    assert not (tmp_path / "loss.png").exists()


def test_format_step_reads_well():
    line = format_step(7, 1000, 4.12341, 1.5, 3e-4, 12345.6, 3 * 2**29, 0.4567)
    assert line == (
        "step    7/1000  loss   4.1234  grad norm       1.5  lr 3.00e-04       12,346 tok/s  "
        "memory    1.50 GiB  MFU  45.7%"
    )


@pytest.mark.parametrize(
    "values",
    [
        (1000, 1000, 0.0001, None, 1e-10, 3.2e6, 79 * 2**30, None),
        (1, 1000, math.nan, 123456.0, 0.0, 0.4, 0, 1.0),
        (20, 1000, 11.5, 1.234567e-8, 1e-3, 987654321.0, 2**40, 0.001),
    ],
)
def test_format_step_keeps_its_columns(values):
    reference = format_step(7, 1000, 4.1, 1.5, 3e-4, 12345.6, 2**30, 0.4)
    line = format_step(*values)
    assert len(line) == len(reference)
    for word in ("loss", "grad norm", "lr", "tok/s", "memory", "MFU"):
        assert line.index(word) == reference.index(word)


def test_flops_per_token_counts_attention_like_palm():
    # One block: 12·H² matmul parameters; 72·H²·(1 + T/(6H)) a token is Narayanan's count without recomputation.
    hidden, context = 64, 96
    narayanan = 72 * hidden**2 * (1 + context / (6 * hidden))
    assert flops_per_token(12 * hidden**2, 1, hidden, context) == pytest.approx(narayanan)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "torch.bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA GH200 120GB", "bf16", 989.4e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("NVIDIA A10", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_peak_flops(device, dtype, peak):
    assert peak_flops(device, dtype) == peak


def test_process_memory_is_a_peak_in_bytes(monkeypatch):
    assert process_memory_bytes() > 10 * 2**20
    monkeypatch.setattr(metrics.sys, "platform", "linux")
    monkeypatch.setattr(metrics.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3))
    assert process_memory_bytes() == 3 * 1024


def test_process_memory_is_the_device_s_where_one_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    assert process_memory_bytes() == 123
