"""A small GPT-2 learns the source of argparse, in a loop of one's own under HF Accelerate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from axonn_recipes.examples.text import windows


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the loss of what is held out, in nats a byte."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a process")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default=None, help="folder for the model")
    options = parser.parse_args(arguments)

    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    set_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 5, options.steps)
    loaders = (DataLoader(part, options.batch_size) for part in windows())
    model, optimizer, training, held_out, schedule = accelerator.prepare(model, optimizer, *loaders, schedule)

    for number, text in enumerate(training):
        if number == options.steps:
            break
        loss = model(text, labels=text).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather(model(text, labels=text).loss) for text in held_out]
    found = torch.stack([one.mean() for one in losses]).mean().item()
    if options.output is not None:
        whole = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            options.output, state_dict=whole, is_main_process=accelerator.is_main_process
        )
    accelerator.print(f"{options.steps} steps: loss {found:.6f}")
    return found


if __name__ == "__main__":
    main()
