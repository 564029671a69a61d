"""Operations that read a table or make an activation of ids: lookups, one-hots, features, position biases"""
