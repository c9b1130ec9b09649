"""The held-out run on the user's own work: logged requests asked again, of real workers, under a dollar cap.

`asking` carries plans out and grades replies; `stage` opens it all from the gate's spec; `rivals` are the contestants
that no other evaluation has.
"""
