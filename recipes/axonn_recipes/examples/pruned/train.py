"""A checkpoint of transformers is pruned little by little while it is fine-tuned with the HF Trainer; SAMO keeps what is left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import LlamaForCausalLM, Trainer

from axonn_recipes.examples.llama import asked, loss_of, untrained
from axonn_recipes.examples.text import windows
from axonn_recipes.examples.trainer.train import Windows


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Fine-tune; returns the saved model's loss on what is held out, in nats a byte, and the share of its layers' weights that is zero."""
    options = asked(arguments, __doc__, output_dir="pruned_output", learning_rate=3e-3)
    checkpoint = Path(str(options.output_dir)) / "dense"
    with options.main_process_first(desc="write the checkpoint"):
        if not checkpoint.exists():
            untrained().save_pretrained(checkpoint)
    training, held_out = map(Windows, windows())
    trainer = Trainer(LlamaForCausalLM.from_pretrained(checkpoint), options, train_dataset=training)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    saved = LlamaForCausalLM.from_pretrained(options.output_dir)
    loss = loss_of(saved, held_out.text)
    layers = [weight for name, weight in saved.named_parameters() if name.endswith("_proj.weight")]
    zeros = sum(int((weight == 0).sum()) for weight in layers) / sum(weight.numel() for weight in layers)
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps: loss {loss:.6f}, {zeros:.1%} pruned")
    return loss, zeros


if __name__ == "__main__":
    main()
