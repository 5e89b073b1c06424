"""Test hosts: loop devices of this machine, and machines of their own."""
