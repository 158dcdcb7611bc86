"""Policies, one folder a family: config, network, processor, checkpoint, and the policy that engines and learners use."""
