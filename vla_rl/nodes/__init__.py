"""Nodes that several pipelines share: rewards, penalties, advantages. None of them knows what the episodes are about.

rewards       how an episode is rewarded, by a name or by "module:function"
penalties     what is taken off a reward: length, distance from the reference policy
advantages    from rewards, and values where there is a critic, to what the learner is told
"""
