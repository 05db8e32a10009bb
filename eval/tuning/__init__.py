"""`kvquant tune`: what a policy costs a model, measured for `kvquant.tuner`, and what is told of the one it finds."""
