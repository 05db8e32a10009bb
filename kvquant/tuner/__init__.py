"""The best precision of every layer for a byte budget: what each codec loses, measured, and an exact choice.

footprint   what a layer takes in bytes under two codecs, exactly
candidates  what may be chosen, and the policy that a choice is
sensitivity what each layer's keys and values lose under each codec; a file
allocation  the choice of least loss within a budget
measuring   an objective, called no more often than needed
repair      from what adds up to what is measured
tune        all of these in order
"""
