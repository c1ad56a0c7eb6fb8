"""Language models, and encoders of texts and images, in Hugging Face folders; decoders also in GGUF files.

>>> import netcl.models
>>> sorted(netcl.models.ARCHITECTURES)[:4]
['bert', 'clip', 'clip_text_model', 'clip_vision_model']
"""

from netcl.models.adapters import LoRALinear, load_adapter, lora, save_adapter
from netcl.models.adapters import merge_adapters as merge
from netcl.models.architectures import ARCHITECTURES as ARCHITECTURES
from netcl.models.architectures import read_config
from netcl.models.config import ModelConfig
from netcl.models.decoder import CausalLM, TextStream
from netcl.models.encoder import DualEncoder, Encoder
from netcl.models.files import describe_model, load, save
from netcl.models.gguf import GGUFFile, write_gguf
from netcl.models.seq2seq import Seq2SeqLM
from netcl.models.tokenizer import Tokenizer

__all__ = [
    "CausalLM", "DualEncoder", "Encoder", "GGUFFile", "LoRALinear", "ModelConfig", "Seq2SeqLM", "TextStream", "Tokenizer",
    "describe_model", "load", "load_adapter", "lora", "merge", "read_config", "save", "save_adapter", "write_gguf",
]  # fmt: skip
