"""Operations that read a table or make an activation of ids: lookups, one-hots, features, position biases;
and that choose the experts of tokens and move these to them"""
