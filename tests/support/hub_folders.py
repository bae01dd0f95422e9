"""Tiny folders that the real libraries write, in the layouts of the Hugging Face Hub, and what these libraries load.

The weights are random. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

Tensors = Mapping[str, torch.Tensor]
SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CAUSAL = SMALL | {"intermediate_size": 24, "num_key_value_heads": 2, "tie_word_embeddings": False}


class HubFolder(NamedTuple):
    """A folder. ``make`` writes it, and ``load`` returns the tensors that ``library`` reads from it.

    ``layout``: how its files are named and divided.
    """

    name: str
    layout: str
    library: str
    make: Callable[[Path], object]
    load: Callable[[Path], Tensors]


def _state(model: Any) -> Tensors:
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def _hub(name: str, **config: Any) -> Any:
    """Return a model of Transformers."""
    import transformers

    torch.manual_seed(1)
    model = getattr(transformers, name)
    return model(model.config_class(**config))


def _loaded(name: str, **options: Any) -> Callable[[Path], Tensors]:
    def load(folder: Path) -> Tensors:
        import transformers

        model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, **options)
        assert not any(info.values()), info
        return _state(model)

    return load


def _llama(folder: Path, **options: Any) -> None:
    _hub("LlamaForCausalLM", **CAUSAL).save_pretrained(folder, **options)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")


def _stale(folder: Path) -> None:
    _llama(folder, max_shard_size="10KB")
    save_file({"old": torch.ones(2)}, folder / "model-00001-of-00009.safetensors", {"format": "pt"})


def _mistral(folder: Path) -> None:
    model = _hub("MistralForCausalLM", **CAUSAL)
    model.save_pretrained(folder, max_shard_size="10KB")
    save_file(dict(_state(model)), folder / "consolidated.safetensors", {"format": "pt"})
    (folder / "params.json").write_text('{"dim": 16}')


def _bert(folder: Path, **options: Any) -> None:
    _hub("BertForSequenceClassification", **SMALL, intermediate_size=24).save_pretrained(folder, **options)


def _variants(folder: Path) -> None:
    _bert(folder)
    _bert(folder, variant="fp16")


def _torch_file(folder: Path) -> None:
    """Transformers 5 loads these files, but does not write them."""
    model = _hub("BertForSequenceClassification", **SMALL, intermediate_size=24)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def _torch_shards(folder: Path) -> None:
    _torch_file(folder)
    state = torch.load(folder / "pytorch_model.bin")
    names = {key: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, key in enumerate(state)}
    for name in set(names.values()):
        torch.save({key: state[key] for key in state if names[key] == name}, folder / name)
    (folder / "pytorch_model.bin").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _both(folder: Path) -> None:
    _torch_file(folder)
    _bert(folder)


MINE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class MyConfig(PretrainedConfig):
    model_type = "casckpt-mine"


class MyModel(PreTrainedModel):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(3, 3)
        self.post_init()
"""


def _remote_code(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(MINE)
    names = {"AutoConfig": "mine.MyConfig", "AutoModel": "mine.MyModel"}
    config = {"model_type": "casckpt-mine", "architectures": ["MyModel"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    state = {"linear.weight": torch.ones(3, 3), "linear.bias": torch.zeros(3)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def _load_remote_code(folder: Path) -> Tensors:
    import transformers

    dynamic: Any = import_module("transformers.dynamic_module_utils")
    dynamic.HF_MODULES_CACHE = str(folder.parent / "modules")
    return _state(transformers.AutoModel.from_pretrained(folder, trust_remote_code=True))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    fast: Any = import_module("transformers").PreTrainedTokenizerFast
    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "salt", "and", "pepper"])}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def _chat(folder: Path) -> None:
    model, tokenizer = _hub("LlamaForCausalLM", **CAUSAL), _tokenizer()
    model.generation_config.max_new_tokens = 3
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_chat(folder: Path) -> Tensors:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = tokenizer.apply_chat_template([{"role": "user", "content": "salt and pepper"}], tokenize=False)
    assert words == "salt and pepper "
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {"generated": model.generate(**tokenizer(words, return_tensors="pt"))} | dict(_state(model))


def _vit(folder: Path) -> None:
    from transformers import ViTImageProcessor

    config = {"image_size": 8, "patch_size": 4, "intermediate_size": 24}
    _hub(
        "ViTForImageClassification", **{k: v for k, v in SMALL.items() if k != "vocab_size"}, **config
    ).save_pretrained(folder)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)


def _load_vit(folder: Path) -> Tensors:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor.from_pretrained(folder)
    pixels = processor(torch.arange(192, dtype=torch.uint8).view(3, 8, 8), return_tensors="pt")["pixel_values"]
    return {"pixels": pixels} | dict(_loaded("ViTForImageClassification")(folder))


def _cached(folder: Path) -> None:
    """Write a snapshot in the download cache, which consists of links to blobs."""
    blobs = folder.parent.parent / "blobs"
    _llama(folder, max_shard_size="10KB")
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), folder))


def _of_dcp(folder: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    model = _hub("LlamaForCausalLM", **CAUSAL)
    shard = {key: 1 + number % 2 for number, key in enumerate(model.state_dict())}
    save(dict(_state(model)), storage_writer=HuggingFaceStorageWriter(str(folder), shard), no_dist=True)
    model.config.save_pretrained(folder)


def _int8(folder: Path) -> None:
    import transformers

    plain = folder.parent / "plain"
    _hub("LlamaForCausalLM", **CAUSAL).save_pretrained(plain)
    chosen = transformers.TorchAoConfig(import_module("torchao.quantization").Int8WeightOnlyConfig())
    model = transformers.LlamaForCausalLM.from_pretrained(plain, quantization_config=chosen)
    model.save_pretrained(folder, max_shard_size="7KB")


def _load_int8(folder: Path) -> Tensors:
    import transformers

    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    return {"logits": model(torch.arange(8)[None]).logits.detach()}


# PEFT


def _adapted(**options: Any) -> Any:
    import peft

    config = getattr(peft, options.pop("kind", "LoraConfig"))
    return peft.get_peft_model(_hub("LlamaForCausalLM", **CAUSAL), config(task_type="CAUSAL_LM", **options))


LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def _adapter(**options: Any) -> Callable[[Path], object]:
    saving = {name: options.pop(name) for name in ("safe_serialization",) if name in options}
    return lambda folder: _adapted(**options).save_pretrained(folder, **saving)


def _two_adapters(folder: Path) -> None:
    import peft

    model = _adapted(**LORA)
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["o_proj"]))
    model.save_pretrained(folder)


def _load_adapter(folder: Path) -> Tensors:
    import peft

    base = _hub("LlamaForCausalLM", **CAUSAL)
    model = peft.PeftModel.from_pretrained(base, folder)
    if (folder / "other").exists():
        model.load_adapter(folder / "other", "other")
    return _state(model)


# Diffusers

UNET = {
    "sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": (8, 8),
    "down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D"),
    "norm_num_groups": 4,
}  # fmt: skip
VAE = {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 3}


def _untyped_diffusers() -> Any:
    """Return the package without its types, which do not cover all its names."""
    return import_module("diffusers")


def _diffusers(name: str, config: Mapping[str, Any], **options: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        diffusers = _untyped_diffusers()

        torch.manual_seed(2)
        getattr(diffusers, name)(**config).save_pretrained(folder, **options)

    return make


def _load_diffusers(name: str, **options: Any) -> Callable[[Path], Tensors]:
    def load(folder: Path) -> Tensors:
        diffusers = _untyped_diffusers()

        return _state(getattr(diffusers, name).from_pretrained(folder, **options))

    return load


def _ddpm(folder: Path, **options: Any) -> None:
    diffusers = _untyped_diffusers()

    pipeline = diffusers.DDPMPipeline(diffusers.UNet2DModel(**UNET), diffusers.DDPMScheduler())
    pipeline.save_pretrained(folder, **options)


def _latent(folder: Path) -> None:
    """Write a pipeline with two components in shards, and the same weights in one file for other programs."""
    diffusers = _untyped_diffusers()

    parts = diffusers.VQModel(**VAE), diffusers.UNet2DModel(**UNET), diffusers.DDIMScheduler()
    diffusers.LDMPipeline(*parts).save_pretrained(folder, max_shard_size="20KB")
    save_file({"all": torch.ones(2)}, folder / "v1-5-pruned.safetensors")


def _load_pipeline(name: str) -> Callable[[Path], Tensors]:
    def load(folder: Path) -> Tensors:
        diffusers = _untyped_diffusers()

        parts = getattr(diffusers, name).from_pretrained(folder).components
        states = {part: _state(model) for part, model in parts.items() if isinstance(model, torch.nn.Module)}
        return {f"{part}.{key}": tensor for part, state in states.items() for key, tensor in state.items()}

    return load


def _diffusers_lora(folder: Path) -> None:
    loader = _untyped_diffusers().loaders.StableDiffusionLoraLoaderMixin

    layers = {"mid.to_q.lora_A.weight": torch.ones(2, 4), "mid.to_q.lora_B.weight": torch.ones(4, 2)}
    loader.save_lora_weights(folder, unet_lora_layers=layers)


def _load_diffusers_lora(folder: Path) -> Tensors:
    loader = _untyped_diffusers().loaders.StableDiffusionLoraLoaderMixin

    name = "pytorch_lora_weights.safetensors"
    state: Tensors = loader.lora_state_dict(folder, weight_name=name)[0]
    return state


# Sentence Transformers


def _sentences(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    models = import_module("sentence_transformers.models")
    words = folder.parent / "words"
    _hub("BertModel", **SMALL, intermediate_size=24).save_pretrained(words)
    _tokenizer().save_pretrained(words)
    parts = models.Transformer(str(words)), models.Pooling(16), models.Dense(16, 4)
    SentenceTransformer(modules=list(parts), device="cpu").save_pretrained(str(folder))


def _static(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    models = import_module("sentence_transformers.models")
    embedding = models.StaticEmbedding(_tokenizer().backend_tokenizer, embedding_dim=4)
    SentenceTransformer(modules=[embedding, models.Normalize()], device="cpu").save_pretrained(str(folder))


def _reranker(folder: Path) -> None:
    from sentence_transformers import CrossEncoder

    words = folder.parent / "words"
    _bert(words)
    _tokenizer().save_pretrained(words)
    CrossEncoder(str(words), device="cpu").save_pretrained(str(folder))


def _load_sentences(folder: Path) -> Tensors:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return {"salt": model.encode("salt and pepper", convert_to_tensor=True)} | dict(_state(model))


def _load_reranker(folder: Path) -> Tensors:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu")
    return {"salt": model.predict([("salt", "pepper")], convert_to_tensor=True)}


_CAUSAL, _BERT = _loaded("LlamaForCausalLM"), "BertForSequenceClassification"
HUB = "transformers"
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
MIXTRAL = CAUSAL | {"num_local_experts": 2}


def _saved(name: str, config: Mapping[str, Any], **options: Any) -> Callable[[Path], object]:
    return lambda folder: _hub(name, **config).save_pretrained(folder, **options)


FOLDERS = [
    HubFolder("Llama", "one file", HUB, _llama, _CAUSAL),
    HubFolder("GPT-2 with tied weights", "one file", HUB, _saved("GPT2LMHeadModel", GPT2), _loaded("GPT2LMHeadModel")),
    HubFolder("BERT classifier", "one file", HUB, _bert, _loaded(_BERT)),
    HubFolder("T5", "one file", HUB, _saved("T5ForConditionalGeneration", T5), _loaded("T5ForConditionalGeneration")),
    HubFolder(
        "Mixtral with fused experts", "one file", HUB, _saved("MixtralForCausalLM", MIXTRAL),
        _loaded("MixtralForCausalLM"),
    ),
    HubFolder("Llama in shards", "shards and an index", HUB, lambda f: _llama(f, max_shard_size="10KB"), _CAUSAL),
    HubFolder(
        "Qwen2 in shards", "shards and an index", HUB, _saved("Qwen2ForCausalLM", CAUSAL, max_shard_size="7KB"),
        _loaded("Qwen2ForCausalLM"),
    ),
    HubFolder("Llama with a stale shard", "shards, an index and other weights", HUB, _stale, _CAUSAL),
    HubFolder(
        "Mistral with a consolidated file", "shards, an index and other weights", HUB, _mistral,
        _loaded("MistralForCausalLM"),
    ),
    HubFolder("BERT with a variant", "two variants", HUB, _variants, _loaded(_BERT)),
    HubFolder("BERT as fp16", "one variant", HUB, lambda f: _bert(f, variant="fp16"), _loaded(_BERT, variant="fp16")),
    HubFolder(
        "BERT as fp16 in shards", "one variant", HUB, lambda f: _bert(f, variant="fp16", max_shard_size="10KB"),
        _loaded(_BERT, variant="fp16"),
    ),
    HubFolder("BERT as pytorch_model.bin", "`.bin`", HUB, _torch_file, _loaded(_BERT)),
    HubFolder("BERT as .bin shards", "`.bin` shards and an index", HUB, _torch_shards, _loaded(_BERT)),
    HubFolder("BERT as both", "safetensors and `.bin`", HUB, _both, _loaded(_BERT)),
    HubFolder("a model with its own code", "remote code", HUB, _remote_code, _load_remote_code),
    HubFolder("Llama with a chat template", "tokenizer and generation config", HUB, _chat, _load_chat),
    HubFolder("ViT with an image processor", "processor", HUB, _vit, _load_vit),
    HubFolder("Llama in the download cache", "links to blobs", HUB, _cached, _CAUSAL),
    HubFolder("Llama from HuggingFaceStorageWriter", "files of DCP with offsets", "torch", _of_dcp, _CAUSAL),
    HubFolder("Llama as int8 in shards", "quantized weights", "torchao", _int8, _load_int8),
    HubFolder("LoRA", "adapter", "peft", _adapter(**LORA), _load_adapter),
    HubFolder(
        "LoRA with a trained head", "adapter", "peft", _adapter(**LORA, modules_to_save=["lm_head"]), _load_adapter,
    ),
    HubFolder(
        "IA3", "adapter", "peft", _adapter(kind="IA3Config", target_modules=["k_proj"], feedforward_modules=[]),
        _load_adapter,
    ),
    HubFolder(
        "prompt tuning", "adapter", "peft", _adapter(kind="PromptTuningConfig", num_virtual_tokens=2), _load_adapter,
    ),
    HubFolder("LoRA as adapter_model.bin", "`.bin`", "peft", _adapter(**LORA, safe_serialization=False), _load_adapter),
    HubFolder("two LoRAs", "adapters in subfolders", "peft", _two_adapters, _load_adapter),
    HubFolder("UNet", "Diffusers model", "diffusers", _diffusers("UNet2DModel", UNET), _load_diffusers("UNet2DModel")),
    HubFolder(
        "UNet as fp16", "one variant", "diffusers", _diffusers("UNet2DModel", UNET, variant="fp16"),
        _load_diffusers("UNet2DModel", variant="fp16"),
    ),
    HubFolder(
        "VAE in shards", "Diffusers model in shards", "diffusers",
        _diffusers("AutoencoderKL", VAE, max_shard_size="10KB"), _load_diffusers("AutoencoderKL"),
    ),
    HubFolder(
        "UNet as .bin", "`.bin`", "diffusers", _diffusers("UNet2DModel", UNET, safe_serialization=False),
        _load_diffusers("UNet2DModel"),
    ),
    HubFolder("DDPM pipeline", "pipeline", "diffusers", _ddpm, _load_pipeline("DDPMPipeline")),
    HubFolder("LDM pipeline in shards", "pipeline", "diffusers", _latent, _load_pipeline("LDMPipeline")),
    HubFolder(
        "DDPM pipeline as .bin", "pipeline", "diffusers", lambda f: _ddpm(f, safe_serialization=False),
        _load_pipeline("DDPMPipeline"),
    ),
    HubFolder("LoRA of a pipeline", "pytorch_lora_weights", "diffusers", _diffusers_lora, _load_diffusers_lora),
    HubFolder("BERT with a dense layer", "modules", "sentence_transformers", _sentences, _load_sentences),
    HubFolder("static embedding", "modules", "sentence_transformers", _static, _load_sentences),
    HubFolder("reranker", "modules", "sentence_transformers", _reranker, _load_reranker),
]  # fmt: skip
