"""Operations that models are written in, one class each: its dims, its layout and collectives, its forward pass and the
bytes that it takes"""
