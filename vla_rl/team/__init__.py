"""The policies that a run trains, with their engines, learners, simulators and devices.

The run itself and the hosts of its episodes both build on this room.

members        one policy or several, each with its engine and its learner
pools          the simulators and text environments that episodes borrow; deliberate faults of simulators
devices        the device of each policy
"""
