"""The learner's side, in a training script: models, data, the replica and the call `Learner.step`.

It stands apart from `runtime` because a user's script runs in this thread and the node in another; the two meet at
`learner.NodePort` only.
"""
