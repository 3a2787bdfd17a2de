"""A small Llama learns the source of argparse with the HF Trainer; all options are those of TrainingArguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer

from axonn_recipes.examples.llama import asked, untrained
from axonn_recipes.examples.text import windows


class Windows(Dataset):
    """Samples of a causal language model.

    Args:
        text: of shape (samples, window).
    """

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"input_ids": self.text[at], "labels": self.text[at]}


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the loss of what is held out, in nats a byte."""
    options = asked(arguments, __doc__, learning_rate=3e-3)
    model = untrained(options.seed)
    training, held_out = map(Windows, windows())
    trainer = Trainer(model, options, train_dataset=training, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
    trainer.save_model()
    found: float = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps: loss {found:.6f}")
    return found


if __name__ == "__main__":
    main()
