"""Shared parts of both OpenVLA families, in the public checkpoints' layout.

They make a Prismatic vision-language model (Karamcheti et al. 2024, arXiv:2402.07865) that outputs
action tokens. The families on top of it (`vla_rl.models.openvla`, `vla_rl.models.openvla_oft`)
define the order of tokens and the attention mask.
"""
