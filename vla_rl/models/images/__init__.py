"""Images as the public checkpoints saw them: JPEG, TensorFlow's resampling and the crop, batched, on any device.

Nothing is imported here, so that configurations can name a pipeline without torch: `pipeline.py` is where to start.
"""
