"""Transformers' Trainer: its checkpoints lie in a store, by one callback. Needs casckpt[transformers].

$ python transformers_trainer.py
in the store: sft@2 sft@4
resumed from step 4, trained to step 6
exported sft@6: model.safetensors and config.json
from_pretrained loads equal weights
"""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TRANSFORMERS_VERBOSITY": "error"}

import shutil
import warnings

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import casckpt
from casckpt.frontends.transformers import CasCheckpointCallback, restore_checkpoint

warnings.filterwarnings("ignore")  # theirs, about this small example

store = casckpt.open("checkpoints")
words = [{"input_ids": torch.arange(n, n + 12), "labels": torch.arange(n, n + 12)} for n in range(16)]


def trainer(steps: int) -> Trainer:
    """Make a trainer that saves every 2 steps, also into the store."""
    transformers.set_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=100, n_positions=32)
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=steps,
        save_steps=2,
        save_total_limit=1,  # the disk holds one folder, the store all of them
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    callback = CasCheckpointCallback(store, run="sft", max_checkpoints=2, gc=True)
    made = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=words, callbacks=[callback])
    made.remove_callback(PrinterCallback)
    return made


trainer(steps=4).train()
print("in the store:", " ".join(f"{ckpt.run}@{ckpt.step}" for ckpt in store.checkpoints("sft")))

shutil.rmtree("out")  # as on a new machine
begun = store.get("sft@latest").step
second = trainer(steps=6)
second.train(resume_from_checkpoint=str(restore_checkpoint(store, "sft@latest", "out")))
print(f"resumed from step {begun}, trained to step {second.state.global_step}")

written = store.export("sft@latest", "exported", format="hf", force=True)
print(f"exported sft@{written.checkpoint.step}: model.safetensors and config.json")
loaded = GPT2LMHeadModel.from_pretrained("exported")
assert second.model is not None
for one, other in zip(loaded.parameters(), second.model.parameters(), strict=True):
    assert torch.equal(one, other)
print("from_pretrained loads equal weights")
