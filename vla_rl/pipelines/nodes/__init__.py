"""Nodes that several pipelines share: rewards, penalties, advantages.

None of them depends on the kind of episodes.

rewards       reward episodes with a function, selected by name or as "module:function"
penalties     subtract costs from rewards: for length, for distance from the reference policy
advantages    compute advantages from rewards, and from values if there is a critic
"""
