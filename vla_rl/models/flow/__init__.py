"""Flow policies: networks that turn noise into a chunk of actions along a learnt velocity."""
