"""What a setting may be, alone and together with others. Pure; `kvhost.settings` is the door."""
