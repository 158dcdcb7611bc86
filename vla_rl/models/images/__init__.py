"""Image processing of the public checkpoints: JPEG, TensorFlow's resampling and the crop, batched,
on any device.

Nothing is imported here, so that configurations can name a pipeline without torch. Start reading at
`pipeline.py`.
"""
