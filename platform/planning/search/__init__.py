"""Search for a plan: all that a configuration leaves open is judged by a closed form, the best is planned and priced"""
