"""Operations that move, join, cut or contract the dims of one activation"""
