"""Language models behind HTTP: continuous batching, and an application with OpenAI's paths. The only package that imports starlette."""

from netcl.serve.app import make_app, run_server
from netcl.serve.batching import Batcher, ServeLimits, TextRequest

__all__ = ["Batcher", "ServeLimits", "TextRequest", "make_app", "run_server"]
