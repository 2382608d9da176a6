from hydralens.cli import main

main()
