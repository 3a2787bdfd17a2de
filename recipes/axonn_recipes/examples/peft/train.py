"""LoRA on a small Llama with PEFT and the HF Trainer; the adapter is PEFT's own, for one process as well."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from axonn_recipes.examples.text import windows
from axonn_recipes.examples.trainer.train import Windows


def base() -> LlamaForCausalLM:
    """The frozen model; where somebody has one, `LlamaForCausalLM.from_pretrained`."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4)
    )


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the loss that the saved adapter has in one process on what is held out, in nats a byte."""
    parser = HfArgumentParser([TrainingArguments], description=__doc__)  # type: ignore[list-item]
    parser.set_defaults(
        output_dir="peft_output",
        max_steps=40,
        learning_rate=1e-2,
        logging_steps=10,
        report_to=["none"],
        disable_tqdm=True,
    )
    (options,) = parser.parse_args_into_dataclasses(arguments)
    training, held_out = map(Windows, windows())
    adapters = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = base()
    trainer = Trainer(get_peft_model(model, adapters), options, train_dataset=training, eval_dataset=held_out)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    alone = PeftModel.from_pretrained(base(), options.output_dir).eval()
    with torch.no_grad():
        found = alone(held_out.text, labels=held_out.text).loss.item()
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps: loss {found:.6f}")
    return found


if __name__ == "__main__":
    main()
