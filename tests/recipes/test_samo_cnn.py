"""The recipe of convolutional networks: shapes of the paper, its data set's files, and both sides trained."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_plugins.optim.reducer import FLAG_BYTES
from axonn_recipes.models.vgg import VGG, VGGConfig
from axonn_recipes.models.wide_resnet import WideResNet, WideResNetConfig
from axonn_recipes.samo_cnn import images
from samo.targets import targets

TRAIN = ["train", "samo_cnn", "--steps", "4", "--batch", "8", "--every", "1", "--window", "1", "--validate-every", "4"]
TRAIN += ["--width", "0.25", "--epsilon", "1", "--scope", "layer"]


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file like scikit-learn's, of random digits."""
    random = np.random.default_rng(0)
    rows = np.hstack([random.integers(0, 17, (60, 64)), random.integers(0, 10, (60, 1))])
    with gzip.open(tmp_path / "digits.csv.gz", "wt") as file:
        np.savetxt(file, rows, "%d", ",")
    monkeypatch.setattr(images, "digits_file", lambda: tmp_path / "digits.csv.gz")


def test_shapes_are_the_papers() -> None:
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in model.parameters()) for model in (VGG(VGGConfig()), WideResNet(WideResNetConfig()))
        ]
        assert sizes == [143_667_240, 126_886_696]  # Table 4.1: 143.67M and 126.89M
        for model in (VGG(VGGConfig()), WideResNet(WideResNetConfig())):
            assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
            convolutions = [name for name, parameter in targets(model).items() if parameter.dim() == 4]
            assert len(convolutions) == (16 if isinstance(model, VGG) else 104)


@pytest.mark.parametrize("model", ["vgg19", "wide_resnet"])
def test_both_sides_train_and_are_reported(
    model: str, digits: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--model", model, "--runs", str(tmp_path / "runs")]) == 0
    numbers = json.loads((tmp_path / "runs" / "samo_cnn" / "results.json").read_text())
    dense, pruned = numbers["sides"]["dense"], numbers["sides"]["pruned"]
    tensors = {"vgg19": 54, "wide_resnet": 62}[model]
    assert pruned["ticket"] and pruned["pruned_at"] == 2 and pruned["kept"] < 0.2 * pruned["parameters"]
    assert dense["reduced_bytes"][-1] == 4 * dense["parameters"] and pruned["reduced_bytes"][-1] == 4 * pruned[
        "kept"
    ] + FLAG_BYTES * (1 + tensors)
    assert dense["losses"][:2] == pytest.approx(pruned["losses"][:2], abs=1e-4)
    assert numbers["metric"] == "accuracy" and 0 <= pruned["final"] <= 1
    assert "48 images to learn from, 12 held out" in capfd.readouterr().out


def test_dry_run_says_what_the_papers_scale_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "samo_cnn", "--scale", "paper", "--dry-run"]) == 0
    assert "VGG-19, 128 images a step: 143,667,240 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "binary"), [("CIFAR-10", False), ("CIFAR-10", True), ("CIFAR-100", False), ("CIFAR-100", True)]
)
def test_cifar_is_read_in_both_versions(name: str, binary: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    data, labels = random.integers(0, 256, (12, 3072), dtype=np.uint8), random.integers(0, 10, 12, dtype=np.uint8)
    training, held_out = images._CIFAR[name]
    shares = np.split(np.arange(10), len(training)) + [np.arange(10, 12)]
    for file, chosen in zip([*training, *held_out], shares, strict=True):
        if binary:
            coarse = np.zeros((len(chosen), images._LABEL_BYTES[name] - 1), np.uint8)
            np.hstack([coarse, labels[chosen, None], data[chosen]]).tofile(tmp_path / f"{file}.bin")
        else:
            key = b"labels" if name == "CIFAR-10" else b"fine_labels"
            (tmp_path / file).write_bytes(pickle.dumps({b"data": data[chosen], key: labels[chosen].tolist()}))
    found = images.read(str(tmp_path))
    assert (found.source, found.classes) == (name, 10 if name == "CIFAR-10" else 100)
    assert (
        found.training_labels.tolist() == labels[:10].tolist()
        and found.validation_labels.tolist() == labels[10:].tolist()
    )
    pixels = torch.from_numpy(data[:10]).view(-1, 3, 32, 32).float()
    deviation, mean = torch.std_mean(pixels, (0, 2, 3), keepdim=True)
    torch.testing.assert_close(found.training * deviation + mean, pixels, atol=1e-3, rtol=0)
    assert found.validation.shape == (2, 3, 32, 32)


class _Harmful:
    def __reduce__(self) -> tuple:
        return print, ("harm",)


def test_a_file_that_would_run_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("train", "test"):
        (tmp_path / file).write_bytes(pickle.dumps(_Harmful()))
    with pytest.raises(ConfigError, match="is not a file of CIFAR-100 .builtins.print is not part of CIFAR.; unpack"):
        images.read(str(tmp_path))
    assert not capsys.readouterr().out


def test_digits_that_are_not_installed_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="come with scikit-learn, which is not installed; pip install"):
        images.read(None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "7"], "--batch 7 is no multiple of the 2 ranks"),
        (["--width", "0"], "--width 0 is not a factor"),
        (["--data", "/none/such"], "--data /none/such holds neither CIFAR-10"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "samo_cnn", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1
