"""A LightningModule around a model of transformers: one callback finds the model inside."""

import argparse
from pathlib import Path

import lightning
import torch
from transformers import AutoModelForCausalLM

import lowmem_patch
from lowmem_patch.integrations import LowmemLightningCallback

TINY_LLAMA = Path(lowmem_patch.__file__).parent / "assets" / "tiny-llama"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=str(TINY_LLAMA))
parser.add_argument("--preset", default="auto")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--out", default="lightning-out")
options = parser.parse_args()


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(options.model).train()

    def training_step(self, batch, index):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


text = (TINY_LLAMA / "README.md").read_bytes() * 8
rows = torch.frombuffer(bytearray(text[: len(text) // 128 * 128]), dtype=torch.uint8)
batches = torch.utils.data.DataLoader(rows.long().view(-1, 128), batch_size=4)

trainer = lightning.Trainer(
    default_root_dir=options.out,
    max_steps=options.steps,
    callbacks=[LowmemLightningCallback(options.preset)],
    logger=False,
)
trainer.fit(LanguageModel(), batches)
