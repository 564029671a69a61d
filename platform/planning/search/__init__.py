"""Search for the plan of a run: what is left open is enumerated, judged by a closed form, and the best planned and priced"""
