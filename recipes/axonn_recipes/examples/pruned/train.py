"""A checkpoint of transformers is pruned little by little while it is fine-tuned with the HF Trainer; SAMO keeps what is left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from axonn_recipes.examples.text import windows
from axonn_recipes.examples.trainer.train import Windows


def write_checkpoint(folder: Path) -> None:
    """A small model in the place of one that somebody has trained."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Fine-tune; returns the saved model's loss on what is held out, in nats a byte, and the share of its layers' weights that is zero."""
    parser = HfArgumentParser([TrainingArguments], description=__doc__)  # type: ignore[list-item]
    parser.set_defaults(
        output_dir="pruned_output",
        max_steps=40,
        learning_rate=3e-3,
        logging_steps=10,
        report_to=["none"],
        disable_tqdm=True,
    )
    (options,) = parser.parse_args_into_dataclasses(arguments)
    checkpoint = Path(options.output_dir) / "dense"
    with options.main_process_first(desc="write the checkpoint"):
        if not checkpoint.exists():
            write_checkpoint(checkpoint)
    training, held_out = map(Windows, windows())
    trainer = Trainer(LlamaForCausalLM.from_pretrained(checkpoint), options, train_dataset=training)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    saved = LlamaForCausalLM.from_pretrained(options.output_dir).eval()
    with torch.no_grad():
        loss = saved(held_out.text, labels=held_out.text).loss.item()
    layers = [weight for name, weight in saved.named_parameters() if name.endswith("_proj.weight")]
    zeros = sum(int((weight == 0).sum()) for weight in layers) / sum(weight.numel() for weight in layers)
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps: loss {loss:.6f}, {zeros:.1%} pruned")
    return loss, zeros


if __name__ == "__main__":
    main()
