"""TRL's SFTTrainer with a PEFT LoRA and the callback for Transformers. Needs casckpt[transformers], trl and peft.

$ python trl_sft.py
trained to step 12; in the store: lora@8 lora@12

If you kill it and restart it, it continues after its newest checkpoint, and the losses are bit-identical.
"""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TRANSFORMERS_VERBOSITY": "error"}

import warnings

import transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

import casckpt
from casckpt.frontends.transformers import CasCheckpointCallback, restore_checkpoint

warnings.filterwarnings("ignore")  # the libraries warn about this small example

words = {word: number for number, word in enumerate(["<pad>", "<end>", "one", "two", "three", "four"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
texts = Dataset.from_list([{"text": f"one two {word} four"} for word in ("one", "two", "three", "four") * 4])

transformers.set_seed(0)
store = casckpt.open("checkpoints")
trainer = SFTTrainer(
    model=GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=len(words), n_positions=32)),
    args=SFTConfig(
        output_dir="out",
        max_steps=12,
        save_steps=4,
        save_total_limit=1,  # the disk holds one folder, and the store holds all checkpoints
        per_device_train_batch_size=2,
        max_length=16,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        bf16=False,
    ),
    train_dataset=texts,
    processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"),
    peft_config=LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True),
    callbacks=[CasCheckpointCallback(store, run="lora", max_checkpoints=2, gc=True)],
)
trainer.remove_callback(PrinterCallback)

trainer.train(resume_from_checkpoint=restore_checkpoint(store, "lora@latest", "out"))  # None at the first start
names = " ".join(f"{ckpt.run}@{ckpt.step}" for ckpt in store.checkpoints("lora"))
print(f"trained to step {trainer.state.global_step}; in the store: {names}")
