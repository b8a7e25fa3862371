"""`python -m lockstep.cli`, where the `lockstep` script is not on the PATH."""

from lockstep.cli.main import main

if __name__ == "__main__":
    main()
