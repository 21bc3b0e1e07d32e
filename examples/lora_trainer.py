"""LoRA with transformers' Trainer: one callback, and a saved adapter that fits the stock model."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import lowmem_patch
from lowmem_patch.integrations import LowmemTrainerCallback

TINY_LLAMA = Path(lowmem_patch.__file__).parent / "assets" / "tiny-llama"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=str(TINY_LLAMA))
parser.add_argument("--preset", default="auto")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--out", default="lora-out")
options = parser.parse_args()

# the bundled model reads bytes: its own card, in rows of 128
text = (TINY_LLAMA / "README.md").read_bytes() * 8
rows = [list(text[start : start + 128]) for start in range(0, len(text) - 128, 128)]
dataset = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(options.model)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))

trainer = Trainer(
    model,
    TrainingArguments(
        options.out, max_steps=options.steps, per_device_train_batch_size=4, report_to=[]
    ),
    train_dataset=dataset,
    callbacks=[LowmemTrainerCallback(options.preset)],
)
trainer.train()

# an adapter of a patched model is an adapter of the stock model
trainer.save_model(options.out)
stock = AutoModelForCausalLM.from_pretrained(options.model)
PeftModel.from_pretrained(stock, options.out)
print(f"the adapter lies in {options.out}, and a report in {options.out}/lowmem_patch.json")
