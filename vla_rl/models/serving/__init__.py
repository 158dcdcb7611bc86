"""How the policies here are served by vLLM: requests and weights on this side, networks on the engine's side.

serve       a policy of any family as `vla_rl.engines.vllm.VllmEngine` takes it
plugin      what vLLM calls in every engine process
prismatic, openvla, openvla_oft   the networks there; stock language models are vLLM's own
"""

from vla_rl.models.serving.serve import serve

__all__ = ["serve"]
