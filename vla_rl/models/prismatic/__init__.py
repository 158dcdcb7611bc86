"""What OpenVLA and OpenVLA-OFT are made of: two vision towers, a projector and a Llama, in the public checkpoints' layout.

A Prismatic vision-language model (Karamcheti et al. 2024, arXiv:2402.07865) that speaks in action tokens. The families on
top of it (`vla_rl.models.openvla`, `vla_rl.models.openvla_oft`) say in which order tokens stand and who looks at whom.
"""
