"""What the server of forked.py loads once, so that nobody that it forks has to."""

import transformers.models.llama.modeling_llama  # noqa: F401

import elastic_worker  # noqa: F401
import thinwire.cli
import thinwire.train  # noqa: F401
