"""Training of packed BERT: objectives, data, the loop, checkpoints and MLPerf submissions.

Internal: the commands `packhorse train` and `packhorse submit` are public, these modules are not.
"""
