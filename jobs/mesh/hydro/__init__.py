"""A two-dimensional Lagrangian hydrodynamics code on quadrilateral meshes: the source of the mesh-tangling data.

The mesh moves with an ideal gas. Velocities are located at nodes, thermodynamic quantities in cells. The discretization
is compatible: mass, momentum and total energy are conserved to round-off.

Arrays of cells are indexed ``[j, i]`` with ``j`` upwards (y, the H of a sample) and ``i`` to the right (x, its W).
Cell (j, i) has its four corners counter-clockwise::

    3 (j+1, i) ------ 2 (j+1, i+1)
        |     edge 2      |
        | edge 3   edge 1 |
        |     edge 0      |
    0 (j, i)  ------- 1 (j, i+1)

The docstrings of the kernels use these terms:

- A *corner* is a pair of a cell and one of its nodes. Its *subzone* is the quarter of the cell next to the node. It is
  bounded by the middles of two edges and the center of the cell.
- dV/dx of a corner is the derivative of the cell's area V with respect to the x coordinate of the node.
- The *median mesh* connects the center of each cell with the middles of its edges.
- The *hourglass velocity* is the part of the four corner velocities that no velocity field linear in x and y has. In a
  parallelogram it does not change the area, so that the pressure does not resist it.
- A *mesh line* is a row or a column of edges from wall to wall.

The unit of length is 128 initial cell sides. The unit of time is such that flows move about one unit of length per unit
of time.

Source: Caramana, Burton, Shashkov, Whalen, "The construction of compatible hydrodynamics algorithms utilizing
conservation of total energy", J. Comput. Phys. 146 (1998).

::

    advance             Kernels of a time step: stable step, motion of nodes, work done on cells
    cell_geometry       Geometry of quadrilateral cells: areas, corner volumes and scaled corner Jacobians
    exact_solutions     Exact solutions for tests of the solver: Sod's shock tube and Sedov's cylindrical blast
    forces              Corner forces: forces of a cell on its four nodes
    initial_conditions  Seeded initial conditions in five families of flow
    jit                 Compilation of the kernels. The only module that imports numba
    solver              The solver: a gas on its mesh, advanced in time
    state               Named groups of arrays that kernels take as arguments
    viscosity           Edge artificial viscosity with a limiter
"""
