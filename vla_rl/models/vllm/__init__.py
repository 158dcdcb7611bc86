"""Policies served by vLLM.

serve              requests in the client process: a policy as the engines of `vla_rl.engines.vllm` take it
served_prismatic   OpenVLA and OpenVLA-OFT in that form
served_language    language models in that form
plugin             registration that vLLM calls in every engine process
networks           the networks in the engine process; stock language models are vLLM's own
"""

from vla_rl.models.vllm.serve import serve as serve
