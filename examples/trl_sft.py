"""TRL's SFTTrainer loads the model and adds the adapters itself; the callback comes after both."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import lowmem_patch
from lowmem_patch.integrations import LowmemTrainerCallback

TINY_LLAMA = Path(lowmem_patch.__file__).parent / "assets" / "tiny-llama"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=str(TINY_LLAMA))
parser.add_argument("--preset", default="auto")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--out", default="sft-out")
options = parser.parse_args()

text = (TINY_LLAMA / "README.md").read_text(encoding="utf-8")
# with tokens already, since the bundled model's are bytes; TRL takes columns of text or messages as well
rows = [{"input_ids": list(line.encode())} for line in text.splitlines() if len(line) > 8]

trainer = SFTTrainer(
    model=options.model,
    args=SFTConfig(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        max_length=128,
        # TRL recomputes every block unless told; try without it first, since a step is faster
        gradient_checkpointing=False,
        bf16=torch.cuda.is_available(),
        report_to=[],
    ),
    train_dataset=Dataset.from_list(rows * 4),
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
    callbacks=[LowmemTrainerCallback(options.preset)],
)
trainer.train()
trainer.save_model(options.out)
