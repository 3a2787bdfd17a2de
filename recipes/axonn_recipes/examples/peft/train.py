"""LoRA on a small Llama with PEFT and the HF Trainer; the adapter is PEFT's own, for one process as well."""

from __future__ import annotations

from collections.abc import Sequence

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer

from axonn_recipes.examples.llama import asked, loss_of, untrained
from axonn_recipes.examples.text import windows
from axonn_recipes.examples.trainer.train import Windows


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the loss that the saved adapter has in one process on what is held out, in nats a byte."""
    options = asked(arguments, __doc__, output_dir="peft_output", learning_rate=1e-2)
    training, held_out = map(Windows, windows())
    adapters = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    trainer = Trainer(get_peft_model(untrained(), adapters), options, train_dataset=training, eval_dataset=held_out)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    found = loss_of(PeftModel.from_pretrained(untrained(), str(options.output_dir)), held_out.text)
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps: loss {found:.6f}")
    return found


if __name__ == "__main__":
    main()
