"""Measuring: is a plan equal to one device, how long does it take, and does that agree with the prediction?"""
