"""A driving world that needs nothing but numpy and OpenCV.

vla_rl/driving-v0             one decision a scene: 4 s of waypoints, graded by PDMS or EPDMS
vla_rl/driving_waypoints-v0   closed loop: waypoints, decided again every 0.5 s
vla_rl/driving_control-v0     closed loop: throttle, steer and brake at 20 Hz
"""
