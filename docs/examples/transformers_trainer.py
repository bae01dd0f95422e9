"""Transformers' Trainer with one callback, which puts its checkpoints into a store. Needs casckpt[transformers].

$ python transformers_trainer.py
trained to step 12; in the store: sft@8 sft@12
exported sft@12: model.safetensors and config.json
from_pretrained loads equal weights

If you kill it and restart it, it continues after its newest checkpoint, and the losses are bit-identical.
"""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TRANSFORMERS_VERBOSITY": "error"}

import warnings

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import casckpt
from casckpt.frontends.transformers import CasCheckpointCallback, restore_checkpoint

warnings.filterwarnings("ignore")  # the libraries warn about this small example

store = casckpt.open("checkpoints")
words = [{"input_ids": torch.arange(n, n + 12), "labels": torch.arange(n, n + 12)} for n in range(16)]

transformers.set_seed(0)
config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=100, n_positions=32)
arguments = TrainingArguments(
    output_dir="out",
    max_steps=12,
    save_steps=4,
    save_total_limit=1,  # the disk holds one folder, and the store holds all checkpoints
    per_device_train_batch_size=2,
    report_to=[],
    disable_tqdm=True,
    logging_strategy="no",
)
callback = CasCheckpointCallback(store, run="sft", max_checkpoints=2, gc=True)
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=words, callbacks=[callback])
trainer.remove_callback(PrinterCallback)

trainer.train(resume_from_checkpoint=restore_checkpoint(store, "sft@latest", "out"))  # None at the first start
names = " ".join(f"{ckpt.run}@{ckpt.step}" for ckpt in store.checkpoints("sft"))
print(f"trained to step {trainer.state.global_step}; in the store: {names}")

written = store.export("sft@latest", "exported", format="hf", force=True)
print(f"exported sft@{written.checkpoint.step}: model.safetensors and config.json")
loaded = GPT2LMHeadModel.from_pretrained("exported")
assert trainer.model is not None
for one, other in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
    assert torch.equal(one, other)
print("from_pretrained loads equal weights")
