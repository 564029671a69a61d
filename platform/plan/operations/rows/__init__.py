"""Operations element by element or row by row: functions, norms, dropout, positions, recurrences"""
