"""Policies served by vLLM: requests and weights in the client process, networks in the engine
processes.

serve       a policy of any family as engines of `vla_rl.engines.vllm` take it
plugin      registration that vLLM calls in every engine process
prismatic, openvla, openvla_oft   the networks in the engine; stock language models are vLLM's own
"""

from vla_rl.models.vllm.serve import serve

__all__ = ["serve"]
