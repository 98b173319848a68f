"""`colibri serve`: models behind the HTTP interfaces that clients already speak.

Owns: nothing; app.py makes the application, each interface is a module. Refuses: everything that is not HTTP:
one AsyncEngine a model does the work.
"""
